-- The catalog: one row per session, derived from its transcript and thrown away at will.

-- name: schema
-- Makes the tables. `recency` is the last activity, negated, so that one ascending order serves.
CREATE TABLE sessions (
    workspace_key TEXT NOT NULL,
    session_id TEXT NOT NULL,
    workspace TEXT NOT NULL,
    root TEXT NOT NULL,
    parent TEXT,
    relation TEXT,
    title TEXT,
    agent TEXT NOT NULL,
    model TEXT,
    permission_mode TEXT NOT NULL,
    settings TEXT NOT NULL,
    extra TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    first_message_at INTEGER,
    last_message_at INTEGER,
    last_activity_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    message_count INTEGER NOT NULL,
    has_errors INTEGER NOT NULL,
    open_turn TEXT,
    archived_at INTEGER,
    paused_at INTEGER,
    quarantine_reason TEXT,
    quarantine_since_at INTEGER,
    git_branch TEXT,
    damage_code TEXT,
    damage_line INTEGER,
    last_seq INTEGER NOT NULL,
    last_commit INTEGER NOT NULL,
    code_history_from_seq INTEGER NOT NULL,
    created_commit INTEGER NOT NULL,
    size INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL,
    inode INTEGER NOT NULL,
    chain TEXT NOT NULL,
    recency INTEGER NOT NULL GENERATED ALWAYS AS (-last_activity_at) STORED,
    PRIMARY KEY (workspace_key, session_id)
) STRICT;
CREATE INDEX sessions_by_recency ON sessions (recency, workspace_key, session_id);
CREATE INDEX sessions_of_workspace ON sessions (workspace_key, recency, session_id);
CREATE INDEX sessions_by_commit ON sessions (last_commit);
CREATE INDEX sessions_damaged ON sessions (workspace_key, session_id) WHERE damage_code NOT NULL;
CREATE TABLE unlisted (
    workspace_key TEXT NOT NULL,
    session_id TEXT NOT NULL,
    code TEXT NOT NULL,
    size INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL,
    inode INTEGER NOT NULL,
    PRIMARY KEY (workspace_key, session_id)
) STRICT;
CREATE TABLE state (
    only INTEGER PRIMARY KEY CHECK (only = 1),
    schema_version INTEGER NOT NULL,
    fold_version INTEGER NOT NULL,
    home_id TEXT NOT NULL,
    applied_commit INTEGER NOT NULL
) STRICT;

-- name: drop
-- Removes the tables of any version.
DROP TABLE IF EXISTS sessions;
DROP TABLE IF EXISTS unlisted;
DROP TABLE IF EXISTS state;

-- name: has_state
-- Tells whether there are tables at all.
SELECT count(*) FROM sqlite_schema WHERE type = 'table' AND name = 'state';

-- name: state
-- Says what the index was made by and how far it has come.
SELECT schema_version, fold_version, home_id, applied_commit FROM state;

-- name: set_state
-- Says so anew.
INSERT OR REPLACE INTO state (only, schema_version, fold_version, home_id, applied_commit)
VALUES (1, :schema_version, :fold_version, :home_id, :applied_commit);

-- name: set_applied
-- Moves the index on; it never goes back.
UPDATE state SET applied_commit = max(applied_commit, :commit);

-- name: put_session
-- Writes a session's row in place of the one before.
INSERT OR REPLACE INTO sessions VALUES (
    ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?,
    ?, ?, ?
);

-- name: put_unlisted
-- Writes down a folder whose transcript does not say whose it is.
INSERT OR REPLACE INTO unlisted VALUES (?, ?, ?, ?, ?, ?);

-- name: delete_session
-- Removes a session's row.
DELETE FROM sessions WHERE workspace_key = ? AND session_id = ?;

-- name: delete_unlisted
-- Removes a folder from those that are not listed.
DELETE FROM unlisted WHERE workspace_key = ? AND session_id = ?;

-- name: stats
-- Gives what the file of each session and folder was like when it was read.
SELECT workspace_key, session_id, size, mtime_ns, inode FROM sessions
UNION ALL SELECT workspace_key, session_id, size, mtime_ns, inode FROM unlisted;

-- name: page
-- Gives the sessions of a walk behind a place in it, as they stand in no later commit.
SELECT * FROM sessions
WHERE (recency, workspace_key, session_id) > (:recency, :key, :session_id)
    AND last_commit <= :as_of
    AND (archived_at IS NOT NULL) = :archived
    AND (:children OR relation IS NOT 'child')
ORDER BY recency, workspace_key, session_id;

-- name: page_of_workspace
-- Gives the same for one workspace.
SELECT * FROM sessions
WHERE workspace_key = :workspace
    AND (recency, session_id) > (:recency, :session_id)
    AND last_commit <= :as_of
    AND (archived_at IS NOT NULL) = :archived
    AND (:children OR relation IS NOT 'child')
ORDER BY recency, session_id;

-- name: moved
-- Names the sessions that have grown since a commit.
SELECT workspace_key, session_id FROM sessions WHERE last_commit > :as_of;

-- name: row
-- Gives one session's row.
SELECT * FROM sessions WHERE workspace_key = ? AND session_id = ?;

-- name: damaged
-- Names the damaged sessions of a scope that are listed, and those that are not.
SELECT workspace_key, session_id, damage_code FROM sessions
WHERE damage_code NOT NULL AND (:workspace IS NULL OR workspace_key = :workspace)
    AND (archived_at IS NOT NULL) = :archived AND (:children OR relation IS NOT 'child')
UNION ALL
SELECT workspace_key, session_id, code FROM unlisted
WHERE :workspace IS NULL OR workspace_key = :workspace;

-- name: integrity
-- Says `ok`, or the first thing that is wrong with the file's own structure.
PRAGMA integrity_check(1);

-- name: unlisted
-- Tells whether a folder is known as one whose transcript does not say whose it is.
SELECT code FROM unlisted WHERE workspace_key = ? AND session_id = ?;
