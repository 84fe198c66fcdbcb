"""Every number that bounds something, and the relations between them.

Nothing in callboard is unbounded (architecture, rule 11): each queue, buffer, wait and file has its
limit here, under the name that the specification pages give it, unit before MAX. The comment names
the rule that uses it. Values are what a plane starts with; the few that may be configured have
their bounds in `RANGES`, and `callboard.config` refuses whatever lies outside.

`CHARS` are code points, `BYTES` are bytes of UTF-8 or of the encoded value, `MS` are milliseconds.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

# ---- Numbers of formats: a change of any of them is a change of the specification ----

PROTOCOL: Final[int] = 1  # every message on the door and on the bus: architecture, section 8
RECORD_FORMAT: Final[int] = 1  # `v` of every record and of the inbox header: REC, INB-3
STORAGE_FORMAT: Final[int] = 1  # `format.json` of a home: architecture, section 3

# ---- The runtime page, section 7 ----

TURN_INPUT_IDS_MAX: Final[int] = 120  # MBX-9
PERMIT_ANSWER_MS: Final[int] = 250  # MBX-6
INBOX_ITEMS_MAX: Final[int] = 160  # sum of the five below

INBOX_USER_ITEMS_MAX: Final[int] = 20  # INB-7
INBOX_PEER_ITEMS_MAX: Final[int] = 20  # INB-7
INBOX_BACKGROUND_ITEMS_MAX: Final[int] = 100  # INB-7
INBOX_SHELL_ITEMS_MAX: Final[int] = 10  # INB-7
INBOX_RECOVERY_ITEMS_MAX: Final[int] = 10  # INB-7
INBOX_USER_BYTES_MAX: Final[int] = 6_242_880  # INB-8
INBOX_BACKGROUND_TOTAL_BYTES_MAX: Final[int] = 7_340_032  # INB-8
INBOX_BYTES_MAX: Final[int] = 8_388_608  # INB-8
INBOX_RECOVERY_RESERVE_BYTES: Final[int] = 131_072  # INB-8
RECOVERY_ITEM_BYTES_MAX: Final[int] = 12_288  # INB-8
INBOX_DEAD_BYTES_MAX: Final[int] = 4_194_304  # INB-2
INBOX_FILE_BYTES_MAX: Final[int] = 16_777_216  # INB-3
ITEM_METADATA_BYTES_MAX: Final[int] = 16_384  # InboxItem.metadata
OUTPUT_SCHEMA_BYTES_MAX: Final[int] = 65_536  # INB-11

QUEUE_ROWS_MAX: Final[int] = 160  # FUQ-1
QUEUE_PREVIEW_CHARS_MAX: Final[int] = 160  # FUQ-1

INPUT_ATTEMPTS_MAX: Final[int] = 5  # RTY-1: turns
RETRY_BASE_MS: Final[int] = 1_000  # RTY-3
RETRY_DELAY_MS_MAX: Final[int] = 60_000  # RTY-3
RETRY_JITTER_PERCENT: Final[int] = 20  # RTY-3: %
RETRY_WINDOW_MS: Final[int] = 120_000  # RTY-3

FOLLOW_UP_TURNS_MAX: Final[int] = 20  # TLP-9, chain_index

IDEMPOTENCY_KEYS_PER_SESSION_MAX: Final[int] = 4_096  # DUR-6: keys

FINAL_TURNS_MAX: Final[int] = 10_000  # FIN-2
FINAL_TOOL_CALLS_MAX: Final[int] = 100_000  # FIN-2
FINAL_DURATION_MS_MAX: Final[int] = 2_592_000_000  # FIN-2

ACTIVITY_TOOLS_MAX: Final[int] = 8  # RUN-14

INTERACTION_DETAILS_BYTES_MAX: Final[int] = 131_072  # INT-3
INTERACTION_RESPONSE_BYTES_MAX: Final[int] = 131_072  # INT-4
INTERACTION_ANSWER_CHARS_MAX: Final[int] = 4_096  # INT-4
INTERACTION_REASON_CHARS_MAX: Final[int] = 1_024  # INT-8

SIDE_QUESTION_CHARS_MAX: Final[int] = 16_384  # SID-2
SIDE_ANSWER_CHARS_MAX: Final[int] = 131_072  # SID-2
SIDE_RECOVERY_BUDGET_MS: Final[int] = 2_000  # SID-1

SHELL_COMMAND_CHARS_MAX: Final[int] = 32_768  # USH-1
SHELL_CAPTURE_STREAM_BYTES_MAX: Final[int] = 524_288  # USH-7
SHELL_LIVE_STREAM_BYTES_MAX: Final[int] = 65_536  # USH-7
SHELL_TIMEOUT_MS: Final[int] = 3_600_000  # USH-3
SHELL_BINARY_SNIFF_BYTES: Final[int] = 4_096  # USH-7
SHELL_EVENTS_PENDING_MAX: Final[int] = 1_024  # USH-7: events

ARTIFACT_INLINE_BYTES_MAX: Final[int] = 32_768  # ART-1, ART-3
ARTIFACT_TAIL_BYTES_MAX: Final[int] = 4_096  # ART-3
ARTIFACT_BYTES_MAX: Final[int] = 4_194_304  # ART-4
ARTIFACT_CHARS_MAX: Final[int] = 1_000_000  # ART-4
ARTIFACT_LAYOUT_PARTS_MAX: Final[int] = 64  # ART-4
ARTIFACTS_PER_SESSION_MAX: Final[int] = 128  # ART-6: artifacts
ARTIFACT_SESSION_BYTES_MAX: Final[int] = 67_108_864  # ART-6
ARTIFACT_READ_BYTES_MIN: Final[int] = 4  # ART-9
ARTIFACT_READ_BYTES_DEFAULT: Final[int] = 24_576  # ART-9
ARTIFACT_READ_BYTES_MAX: Final[int] = 65_536  # ART-9
ARTIFACT_UNNAMED_MS: Final[int] = 600_000  # ART-12
ARTIFACT_STORES_BYTES_MAX: Final[int] = 67_108_864  # ART-2

ERRNO_RETRIES_MAX: Final[int] = 2  # TLS-5: tries
ERRNO_RETRY_DELAY_MS: Final[int] = 200  # TLS-5: ms, x attempt

FAILURE_TEXT_CHARS_MAX: Final[int] = 8_192  # FLR-1

PROCESS_KILL_GRACE_MS: Final[int] = 500  # PRC-4, PRC-5, 3.5
PROCESS_WATCHDOG_MS: Final[int] = 500  # PRC-4
FOREGROUND_BUDGET_MS: Final[int] = 15_000  # PRC-8; RANGES; 0 off
PROCESS_STREAM_BYTES_MAX: Final[int] = 1_048_576  # PRC-10
PROCESS_RECORD_BYTES_MAX: Final[int] = 16_384  # PRC-12
PROCESS_LABEL_CHARS_MAX: Final[int] = 128  # ProcessLease
BACKGROUND_SESSION_MAX: Final[int] = 4  # PRC-9: processes
BACKGROUND_PLANE_MAX: Final[int] = 128  # PRC-9: processes; RANGES

CHILD_RESULT_CHARS_MAX: Final[int] = 1_000_000  # CHD-3
CHILD_ERROR_CHARS_MAX: Final[int] = 100_000  # CHD-3
CHILD_LIST_MAX: Final[int] = 10_000  # CHD-3: entries
CHILD_RECOVERY_PARALLEL_MAX: Final[int] = 4  # CHD-2: children

COMPLETION_RESULT_CHARS_MAX: Final[int] = 32_000  # BGC-3
COMPLETION_ERROR_CHARS_MAX: Final[int] = 8_000  # BGC-3
COMPLETION_DESCRIPTION_CHARS_MAX: Final[int] = 100  # BGC-3
COMPLETION_SUMMARY_CHARS_MAX: Final[int] = 500  # BGC-3

RESIDENT_SESSIONS_MAX: Final[int] = 1_024  # RES-1; RANGES
RESIDENT_IDLE_MS: Final[int] = 300_000  # RES-3; RANGES
RESIDENT_SWEEP_MS: Final[int] = 30_000  # RES-3
RESIDENT_MEMORY_BYTES_MAX: Final[int | None] = None  # RES-3: unset; else at least 268,435,456
SESSION_STOP_MS: Final[int] = 5_000  # RES-4, LSE-7

ACTIVE_TURNS_MAX: Final[int] = 256  # ADM-4; RANGES
TURN_QUEUE_MAX: Final[int] = 10_000  # ADM-4: requests; RANGES
ACTIVATION_QUEUE_MAX: Final[int] = 1_024  # ADM-1: requests; RANGES
ACTIVATION_QUEUE_BYTES_MAX: Final[int] = 67_108_864  # ADM-1; RANGES

TOOL_WAIT_MS: Final[int] = 180_000  # TLS-2

TOOL_CALLS_PER_RESPONSE_MAX: Final[int] = 64  # TLP-5: calls

TOOL_GATE_WAITING_MAX: Final[int] = 64  # TLS-4: calls
TOOLS_SESSION_MAX: Final[int] = 10  # TLS-1: runs
TOOLS_SESSION_READONLY_MAX: Final[int] = 8  # TLS-1: runs
TOOLS_SESSION_WRITE_MAX: Final[int] = 4  # TLS-1: runs
TOOLS_SESSION_EXECUTE_MAX: Final[int] = 2  # TLS-1: runs
TOOLS_SESSION_QUEUED_MAX: Final[int] = 64  # TLS-2: runs
TOOLS_PLANE_MAX: Final[int] = 256  # TLS-1: runs
TOOLS_PLANE_READONLY_MAX: Final[int] = 192  # TLS-1: runs
TOOLS_PLANE_WRITE_MAX: Final[int] = 64  # TLS-1: runs
TOOLS_PLANE_EXECUTE_MAX: Final[int] = 24  # TLS-1: runs
TOOLS_PLANE_QUEUED_MAX: Final[int] = 2_048  # TLS-2: runs

GATE_LABEL_CHARS_MAX: Final[int] = 64  # GTE-1
GATE_DRAIN_MS: Final[int] = 4_000  # GTE-3, RUN-12

SHUTDOWN_CLEANUP_MS: Final[int] = 4_000  # SHD-1
SHUTDOWN_HARD_MS: Final[int] = 5_000  # SHD-1
SHUTDOWN_EXIT_DELAY_MS: Final[int] = 100  # SHD-1
SHUTDOWN_SECOND_SIGNAL_MS: Final[int] = 3_000  # SHD-1

# ---- The lifecycle page, section 7 ----

CATALOG_PAGE_ROWS_DEFAULT: Final[int] = 50  # CAT-1
CATALOG_PAGE_ROWS_MAX: Final[int] = 100  # CAT-1
WARNINGS_MAX: Final[int] = 20  # CatalogPage: items

CURSOR_CHARS_MAX: Final[int] = 1_024  # CUR-3
SESSION_ID_CHARS_MAX: Final[int] = 200  # session id

WORKSPACE_PATH_BYTES_MAX: Final[int] = 4_096  # IDN-2
WORKSPACE_SLUG_CHARS_MAX: Final[int] = 32  # workspace key

TITLE_CHARS_MAX: Final[int] = 200  # MET-3
MODEL_ID_CHARS_MAX: Final[int] = 500  # SessionMetadata
SETTINGS_ENTRIES_MAX: Final[int] = 32  # MET-3
EXTRA_BYTES_MAX: Final[int] = 16_384  # MET-3
PROMPT_SUMMARY_CHARS_MAX: Final[int] = 1_000  # TaskView
MESSAGE_ID_CHARS_MAX: Final[int] = 128  # runtime ids
CALL_ID_CHARS_MAX: Final[int] = 512  # runtime ids

RECORD_BYTES_MAX: Final[int] = 1_048_576  # REC-12

FRAME_BYTES_MAX: Final[int] = 8_388_608  # FRK-8, 3.5

READ_RETRIES_MAX: Final[int] = 3  # REC-6: tries

LINEAGE_ANCESTORS_MAX: Final[int] = 128  # FRK-2, ARC-3: levels

ARCHIVE_FAMILY_SESSIONS_MAX: Final[int] = 10_000  # ARC-8

DELETE_DRAIN_MS: Final[int] = 10_000  # DEL-1
TOMBSTONE_RETENTION_MS: Final[int] = 7_776_000_000  # DEL-6

STALE_EMPTY_AGE_MS: Final[int] = 86_400_000  # MET-7
STALE_COLLECT_PERIOD_MS: Final[int] = 3_600_000  # MET-7

CONTEXT_REPLACEMENTS_MAX: Final[int] = 4_096  # CTX-1: messages
CONTEXT_REPLACEMENTS_BYTES_MAX: Final[int] = 16_777_216  # CTX-1
HANDOFF_PERCENT: Final[int] = 70  # CTX-2, host CTM-4: %
COMPACTION_PERCENT: Final[int] = 80  # CTX-2, host CTM-4: %

STATE_SNAPSHOT_INTERVAL_RECORDS: Final[int] = 256  # ACT-2: records
STATE_SNAPSHOT_INTERVAL_BYTES: Final[int] = 1_048_576  # ACT-2
STATE_SNAPSHOT_BYTES_MAX: Final[int] = 4_194_304  # ACT-3
STATE_SNAPSHOTS_KEPT_MAX: Final[int] = 2  # ACT-3: snapshots

CHECKPOINT_PREVIEW_CHARS_MAX: Final[int] = 160  # RWD-1; + 3 dots
CHECKPOINT_PAGE_ROWS_MAX: Final[int] = 100  # RWD-1

HISTORY_PAGE_MESSAGES_MAX: Final[int] = 500  # HIS-1

SNAPSHOT_FILE_BYTES_MAX: Final[int] = 67_108_864  # SNP-3
SNAPSHOT_SESSION_BYTES_MAX: Final[int] = 536_870_912  # SNP-4
SNAPSHOT_CHUNK_BYTES: Final[int] = 1_048_576  # SNP-3

SEARCH_HITS_DEFAULT: Final[int] = 20  # SRH-3
SEARCH_HITS_MAX: Final[int] = 200  # SRH-3
SEARCH_QUERY_CHARS_MAX: Final[int] = 1_000  # SRH-3
SNIPPET_CONTEXT_CHARS: Final[int] = 80  # SRH-6
SEARCH_DEADLINE_MS: Final[int] = 30_000  # SRH-9
DIRECTORY_SEARCH_FILES_MAX: Final[int] = 10_000  # SRH-10

INDEX_BUSY_TIMEOUT_MS: Final[int] = 5_000  # IDX-4
INDEX_RETRY_MS: Final[int] = 5_000  # IDX-5
INDEX_WAL_BYTES_MAX: Final[int] = 67_108_864  # IDX-4
INDEX_SCHEMA_VERSION: Final[int] = 1  # IDX-4

FOLD_VERSION: Final[int] = 1  # ACT-1, IDX-4

REDACTION_VERSION: Final[int] = 1  # EXP-1
EXPORT_BYTES_MAX: Final[int] = 16_777_216  # EXP-5
EXPORT_ITEM_BYTES_MAX: Final[int] = 65_536  # EXP-5
EXPORT_INLINE_BYTES_MAX: Final[int] = 1_048_576  # EXP-7

EXPORT_DEPTH_MAX: Final[int] = 8  # RED-6: levels
EXPORT_ENTRIES_MAX: Final[int] = 200  # RED-6: items

EXPORT_PARTS_MAX: Final[int] = 1_000  # EXP-5
EXPORT_ID_CHARS: Final[int] = 12  # EXP-7

EXPORT_TEMP_AGE_MS: Final[int] = 86_400_000  # WRT-3

IMPORT_BYTES_MAX: Final[int] = 268_435_456  # IMP-10
IMPORT_LINE_BYTES_MAX: Final[int] = 16_777_216  # IMP-10
IMPORT_ITEMS_MAX: Final[int] = 1_000_000  # IMP-10
IMPORT_SKIPPED_LISTED_MAX: Final[int] = 100  # IMP-6: items
IMPORT_SNIFF_BYTES: Final[int] = 65_536  # IMP-3
IMPORT_SNIFF_SCORE_MIN: Final[int] = 50  # IMP-3

# ---- The host page, section 7 ----

TURN_FAILURE_CHARS_MAX: Final[int] = 500  # TEX-4, TEX-9
TURN_DEADLINE_MS_MAX: Final[int] = 86_400_000  # TurnRequest
CANCEL_READMIT_MS: Final[int] = 1_000  # TEX-14
CANCEL_WAIT_MS: Final[int] = 5_000  # TEX-14, DLV-9, TSK-4
CANCEL_GRACE_MS: Final[int] = 5_000  # TEX-14
RECOVERY_SETTLE_MS: Final[int] = 5_000  # section 5
ATTACHMENTS_MAX: Final[int] = 16  # TurnRequest: items
INJECTED_CONTEXT_CHARS_MAX: Final[int] = 65_536  # TurnRequest

INTERACTION_METADATA_BYTES_MAX: Final[int] = 16_384  # ECX-3

AGENT_SOURCE_BYTES_MAX: Final[int] = 16_777_216  # AGT-3
MODEL_STEPS_MAX: Final[int] = 90  # AGT-4, LOP-1

TOOL_TEXT_CHARS_MAX: Final[int] = 4_000  # LOP-5

OPERATOR_REASON_CHARS_MAX: Final[int] = 200  # PRN-3
REPAIR_REASON_CHARS_MAX: Final[int] = 300  # PRN-9
AUDIT_LOOKUP_ID_CHARS_MAX: Final[int] = 256  # PRN-8
AUDIT_SEGMENT_BYTES_MAX: Final[int] = 67_108_864  # 1.1
ROW_RETENTION_MS: Final[int] = 604_800_000  # 1.1

CONVERSATION_LIST_ROWS_DEFAULT: Final[int] = 20  # CNV-4
DERIVED_TITLE_CHARS_MAX: Final[int] = 80  # CNV-7
DERIVED_PREVIEW_CHARS_MAX: Final[int] = 120  # CNV-7

QUERY_PAGE_ROWS_DEFAULT: Final[int] = 100  # QRY-1
QUERY_PAGE_ROWS_MAX: Final[int] = 1_000  # QRY-1

TASK_PAGE_ROWS_DEFAULT: Final[int] = 50  # TSK-7

TOOL_SEARCH_RESULTS_MAX: Final[int] = 50  # QRY-1: rows
TOOL_SEARCH_SNIPPET_CHARS_MAX: Final[int] = 800  # QRY-1

ENVELOPE_BYTES_MAX: Final[int] = 1_048_576  # ENV-1
INBOUND_MEDIA_BYTES_MAX: Final[int] = 20_971_520  # ENV-1
INBOUND_HEADER_ALLOWLIST: Final[tuple[str, ...]] = (  # ENV-6
    "content-type",
    "user-agent",
    "x-request-id",
)
DEDUP_TTL_MS: Final[int] = 604_800_000  # ENV-5
CHANNEL_FAILURES_MAX: Final[int] = 3  # ENV-7

ROUTES_PER_SESSION_MAX: Final[int] = 16  # RTE-1: routes
ROUTE_GRACE_MS: Final[int] = 30_000  # RTE-7

DELIVERY_SEND_TIMEOUT_MS: Final[int] = 60_000  # DLV-5
DELIVERY_ATTEMPTS_MAX: Final[int] = 5  # DLV-5: tries
DELIVERY_UNROUTED_TTL_MS: Final[int] = 604_800_000  # DLV-7
OUTBOX_PER_ROUTE_MAX: Final[int] = 1_000  # DLV-12: rows

APPROVAL_CACHE_TTL_MS: Final[int] = 28_800_000  # APR-3
APPROVAL_EXPIRY_MS: Final[int] = 86_400_000  # APR-5
APPROVAL_EXPIRY_CHAT_MS: Final[int] = 600_000  # APR-5

APPROVALS_WAITING_MAX: Final[int] = 16  # runtime INT-3: requests

APPROVAL_PREVIEW_DEPTH_MAX: Final[int] = 6  # APR-8: levels
APPROVAL_PREVIEW_ITEMS_MAX: Final[int] = 50  # APR-8
APPROVAL_PREVIEW_CHARS_MAX: Final[int] = 500  # APR-8
APPROVAL_SUMMARY_CHARS_MAX: Final[int] = 500  # APR-8
APPROVAL_TARGET_CHARS_MAX: Final[int] = 1_000  # APR-8
APPROVAL_COMMAND_CHARS_MAX: Final[int] = 2_000  # APR-8
APPROVAL_TEXT_VIEW_CHARS_MAX: Final[int] = 1_000  # APR-8
TRUNCATION_MARKER_CHARS_MAX: Final[int] = 40  # APR-8
BUTTON_LABEL_CHARS_MAX: Final[int] = 32  # APR-10

PROMPT_CHOICES_MAX: Final[int] = 4  # PRM-1

SECRET_BINDINGS_MAX: Final[int] = 16  # EFX-4: per call

TASK_LOG_LINES_MAX: Final[int] = 4_000  # TSK-6
TASK_TAIL_LINES_MAX: Final[int] = 40  # TSK-6, TSK-10
TASK_TAIL_CHARS_MAX: Final[int] = 8_000  # TSK-6
TASK_SUMMARY_CHARS_MAX: Final[int] = 1_200  # TSK-6
YIELD_DEFAULT_MS: Final[int] = 30_000  # TSK-8
BLOCKED_TASK_EXPIRY_MS: Final[int] = 86_400_000  # TSK-5

DELEGATION_DEPTH_MAX: Final[int] = 2  # CHS-3: levels
CHILDREN_PER_TURN_MAX: Final[int] = 4  # CHS-3: children
CHILDREN_RUNNING_MAX: Final[int] = 2  # CHS-3: children
FORK_CONTEXT_MESSAGES_MAX: Final[int] = 12  # CHS-6

SLOT_TIMEOUT_MS: Final[int] = 30_000  # SLT-2
SLOT_TIMEOUT_MS_MAX: Final[int] = 600_000  # SLT-2

CONTEXT_OUTPUT_TOKENS_MIN: Final[int] = 1_024  # CTM-3
CONTEXT_OUTPUT_SHARE: Final[float] = 0.20  # CTM-3: of window
CONTEXT_SAFETY_SHARE: Final[float] = 0.02  # CTM-3: of window
CONTEXT_PRUNE_CHARS_MIN: Final[int] = 512  # CTM-4
CONTEXT_HEAD_TURNS: Final[int] = 1  # CTM-5: turns
CONTEXT_TAIL_TURNS: Final[int] = 6  # CTM-5, CMP-1: turns
CONTEXT_RETAINED_MESSAGES_MAX: Final[int] = 2_000  # CTM-7
CONTEXT_RETAINED_BYTES_MAX: Final[int] = 8_388_608  # CTM-7
CONTEXT_DEBUG_CHARS_MAX: Final[int] = 8_000  # CTM-10
CONTEXT_FACTOR_UNOBSERVED: Final[float] = 1.15  # CTM-8: ratio
CONTEXT_SHARE_AGENT_TEXT: Final[float] = 0.20  # CTM-4: of hard budget
CONTEXT_SHARE_SKILL_INDEX: Final[float] = 0.05  # CTM-4: of hard budget
CONTEXT_SHARE_BOOTSTRAP: Final[float] = 0.10  # CTM-4: of hard budget
CONTEXT_SHARE_SYSTEM: Final[float] = 0.15  # CTM-4: of hard budget
CONTEXT_SHARE_SUMMARY: Final[float] = 0.10  # CTM-4: of hard budget
CONTEXT_SHARE_PRE: Final[float] = 0.10  # CTM-4: of hard budget, each of the two

COMPACTION_REQUEST_TOKENS_MAX: Final[int] = 32_768  # CMP-1
COMPACTION_SUMMARY_TOKENS_MAX: Final[int] = 2_048  # CMP-4
COMPACTION_CALL_MS: Final[int] = 60_000  # CMP-1
COMPACTION_LEASE_WAIT_MS: Final[int] = 5_000  # CMP-2
COMPACTION_COOLDOWN_MS: Final[int] = 60_000  # CMP-3

FILE_READ_CHARS_MAX: Final[int] = 20_000  # EFX-6
PROCESS_TAIL_CHARS_MAX: Final[int] = 12_000  # EFX-6, TSK-9
PROCESS_VISIBLE_CHARS_MAX: Final[int] = 12_100  # EFX-6
MCP_DISCOVERY_PARALLEL_MAX: Final[int] = 4  # EFX-7: servers
MCP_FAILURE_TTL_MS: Final[int] = 30_000  # EFX-7
MCP_TIMEOUT_MS: Final[int] = 30_000  # EFX-7

SCHEDULE_ID_CHARS_MAX: Final[int] = 64  # SCH-1
SCHEDULE_SLUG_CHARS_MAX: Final[int] = 48  # SCH-1
SCHEDULE_POLL_MS: Final[int] = 30_000  # SCH-2
SCHEDULE_RUNS_PARALLEL_MAX: Final[int] = 4  # SCH-4: runs

STATE_VALUE_BYTES_MAX: Final[int] = 262_144  # STT-1

# ---- The reliability page, section 7 ----

JOURNAL_SEGMENT_BYTES: Final[int] = 67_108_864  # FLT-6
JOURNAL_SEGMENTS_MAX: Final[int] = 16  # FLT-10
JOURNAL_IDLE_MARK_MS: Final[int] = 200  # FLT-8
CHECKPOINT_BYTES: Final[int] = 33_554_432  # FLT-10: bytes of frames
CHECKPOINT_MS: Final[int] = 30_000  # FLT-10: ms since the last, if anything is pending
COMMIT_BATCH_FRAMES_MAX: Final[int] = 1_024  # FLT-2
COMMIT_BATCH_BYTES_MAX: Final[int] = 16_777_216  # FLT-2
STAGED_OPERATIONS_MAX: Final[int] = 4  # lifecycle 3.5: operations
STAGED_BYTES_MAX: Final[int] = 268_435_456  # lifecycle 3.5
COMMIT_SHARED_BYTES_MAX: Final[int] = 1_048_576  # FLT-2
STORAGE_QUEUE_FRAMES_MAX: Final[int] = 10_000  # FLT-2
STORAGE_QUEUE_BYTES_MAX: Final[int] = 268_435_456  # FLT-2
RESERVE_BYTES: Final[int] = 16_777_216  # FLT-21
STORAGE_FULL_PROBE_MS: Final[int] = 1_000  # FLT-21
INDEX_FREE_FLOOR_BYTES: Final[int] = 67_108_864  # FLT-24
INDEX_OFF_MS: Final[int] = 60_000  # FLT-24
STORAGE_RESTARTS_MAX: Final[int] = 3  # FLT-4, FLT-32
GATEWAY_RESTARTS_MAX: Final[int] = 5  # FLT-32
SESSION_RESTARTS_MAX: Final[int] = 3  # FLT-32
RESTART_WINDOW_MS: Final[int] = 60_000  # FLT-32
RESTART_BACKOFF_MS: Final[int] = 100  # FLT-32
RESTART_BACKOFF_MS_MAX: Final[int] = 10_000  # FLT-32
MAIN_EXIT_MS: Final[int] = 1_000  # FLT-3, FLT-26

CHILD_ORPHAN_MS: Final[int] = 1_500  # RLB-16

ACTOR_HEARTBEAT_MS: Final[int] = 1_000  # FLT-26
IDLE_HEARTBEAT_MS: Final[int] = 60_000  # FLT-26
ACTOR_SILENT_MS: Final[int] = 10_000  # FLT-27
CLIENT_CONNECTIONS_MAX: Final[int] = 256  # FLT-41; RANGES
CLIENT_HANDSHAKE_MS: Final[int] = 2_000  # FLT-41
CLIENT_MESSAGE_BYTES_MAX: Final[int] = 5_242_880  # FLT-56
CLIENT_REQUESTS_PENDING_MAX: Final[int] = 256  # FLT-59: requests per connection
CLIENT_OUTPUT_BYTES_MAX: Final[int] = 8_388_608  # FLT-59: bytes per connection
CLIENT_BAD_INPUT_MAX: Final[int] = 16  # FLT-59: refusals in 10 s
DOOR_BACKLOG_MAX: Final[int] = 64  # FLT-41: connections
BUS_MESSAGE_BYTES_MAX: Final[int] = 9_437_184  # FLT-42, FLT-56
BUS_QUEUE_MESSAGES_MAX: Final[int] = 1_000  # FLT-42
BUS_HANDSHAKE_MS: Final[int] = 2_000  # FLT-42
RUNTIME_PATH_BYTES_MAX: Final[int] = 99  # FLT-42
DISK_FREE_ALARM_BYTES: Final[int] = 1_073_741_824  # FLT-22
QUEUE_ALARM_PERCENT: Final[int] = 70  # FLT-22: %
STORAGE_LEVELS_MS: Final[int] = 5_000  # FLT-22
FD_RESERVE: Final[int] = 128  # FLT-45: descriptors
FD_PER_SESSION: Final[int] = 2  # FLT-45: descriptors
FD_ALARM_PERCENT: Final[int] = 70  # FLT-45: %
FD_REFUSE_PERCENT: Final[int] = 85  # FLT-45: %
OOM_SCORE_SESSION: Final[int] = 500  # FLT-52
JSON_DEPTH_MAX: Final[int] = 64  # FLT-55, FLT-56: levels
FREE_DEPTH_MAX: Final[int] = 59  # FLT-56: of a free field, what stands around it left out
INT_ABS_MAX: Final[int] = 9_007_199_254_740_991  # FLT-55
MESSAGE_ITEMS_MAX: Final[int] = 65_536  # FLT-56
DECODE_MS_MAX: Final[int] = 50  # FLT-54
HTTP_HEADER_BYTES_MAX: Final[int] = 32_768  # FLT-66
HTTP_HEADERS_MAX: Final[int] = 100  # FLT-66
HTTP_BODY_BYTES_MAX: Final[int] = 5_242_880  # FLT-66
HTTP_HEADER_MS: Final[int] = 10_000  # FLT-66
HTTP_BODY_MS: Final[int] = 30_000  # FLT-66
LOG_LINE_CHARS_MAX: Final[int] = 4_096  # FLT-60
LOG_FILE_BYTES_MAX: Final[int] = 16_777_216  # FLT-60
LOG_FILES_KEPT_MAX: Final[int] = 5  # FLT-60: files per actor
REDACT_CARRY_CHARS: Final[int] = 200  # FLT-61
TOKEN_BYTES: Final[int] = 32  # FLT-62
FINDINGS_PER_FILE_MAX: Final[int] = 20  # section 5.1: findings
VERIFY_LOOKS: Final[int] = 3  # section 5.1: looks at what a running writer may be changing

# ---- The beyond page, section 2 ----

DEBOUNCE_MS_MAX: Final[int] = 60_000  # POL-1
CONTROL_ACK_MS: Final[int] = 50  # POL-5

COMPACTION_FRUITLESS_MAX: Final[int] = 2  # BRK-1: compactions
BREAKER_FAILURES_MAX: Final[int] = 5  # BRK-2
BREAKER_PROBE_MS: Final[int] = 30_000  # BRK-2

AGENT_MEMORY_BYTES_MAX: Final[int | None] = None  # CAP-3
AGENT_CPU_PERCENT_MAX: Final[int | None] = None  # CAP-3: % of a core
AGENT_DESCRIPTORS_MAX: Final[int | None] = None  # CAP-3
AGENT_PROCESSES_MAX: Final[int | None] = None  # CAP-3
AGENT_FILE_BYTES_MAX: Final[int | None] = None  # CAP-3

# ---- On no page: a file that only its owner writes ----

CONFIG_BYTES_MAX: Final[int] = 65_536  # config.toml

# ---- What may be configured: {limit: (lowest, highest)}, both allowed ----

RANGES: Final[Mapping[str, tuple[int, int]]] = MappingProxyType(
    {
        # As the pages give them.
        "FOREGROUND_BUDGET_MS": (1_000, 300_000),  # 0 switches it off
        "BACKGROUND_PLANE_MAX": (4, 4_096),
        "RESIDENT_SESSIONS_MAX": (1, 65_536),
        "RESIDENT_IDLE_MS": (30_000, 3_600_000),
        "RESIDENT_MEMORY_BYTES_MAX": (268_435_456, INT_ABS_MAX),
        "ACTIVE_TURNS_MAX": (1, 4_096),
        "TURN_QUEUE_MAX": (1, 100_000),
        "ACTIVATION_QUEUE_MAX": (1, 10_000),
        "ACTIVATION_QUEUE_BYTES_MAX": (65_536, 134_217_728),
        "CLIENT_CONNECTIONS_MAX": (1, 4_096),
        # The pages fix these; smaller ones let a test see many checkpoints and segments. A frame
        # above the segment size has a segment of its own, so a small one loses nothing.
        "CHECKPOINT_MS": (10, 30_000),
        "CHECKPOINT_BYTES": (4_096, 33_554_432),
        "JOURNAL_SEGMENT_BYTES": (4_096, 67_108_864),
    }
)

# ---- Asserted beneath ----

# R1, INB-7: the five kinds share the inbox out without rest; a turn takes less than a full inbox.
assert INBOX_ITEMS_MAX == (
    INBOX_USER_ITEMS_MAX
    + INBOX_PEER_ITEMS_MAX
    + INBOX_BACKGROUND_ITEMS_MAX
    + INBOX_SHELL_ITEMS_MAX
    + INBOX_RECOVERY_ITEMS_MAX
)
assert TURN_INPUT_IDS_MAX <= INBOX_ITEMS_MAX <= QUEUE_ROWS_MAX

# INB-8: the reserve holds every recovery item, and no class may fill the whole inbox.
assert INBOX_RECOVERY_ITEMS_MAX * RECOVERY_ITEM_BYTES_MAX <= INBOX_RECOVERY_RESERVE_BYTES
assert INBOX_USER_BYTES_MAX + INBOX_RECOVERY_RESERVE_BYTES < INBOX_BYTES_MAX
assert INBOX_BACKGROUND_TOTAL_BYTES_MAX + INBOX_RECOVERY_RESERVE_BYTES < INBOX_BYTES_MAX
assert INBOX_BYTES_MAX + INBOX_DEAD_BYTES_MAX < INBOX_FILE_BYTES_MAX

# Reliability page, section 7.
assert FRAME_BYTES_MAX < BUS_MESSAGE_BYTES_MAX
assert FRAME_BYTES_MAX <= COMMIT_BATCH_BYTES_MAX <= RESERVE_BYTES <= JOURNAL_SEGMENT_BYTES // 4
assert ARTIFACT_BYTES_MAX < ARTIFACT_STORES_BYTES_MAX
assert ARTIFACT_BYTES_MAX < CLIENT_MESSAGE_BYTES_MAX == HTTP_BODY_BYTES_MAX
assert CLIENT_HANDSHAKE_MS < ACTOR_SILENT_MS
assert PROCESS_WATCHDOG_MS + PROCESS_KILL_GRACE_MS < CHILD_ORPHAN_MS

# Runtime page, section 7: a session limit is never above its plane limit.
assert RANGES["BACKGROUND_PLANE_MAX"][0] >= BACKGROUND_SESSION_MAX
assert TOOLS_SESSION_MAX <= TOOLS_PLANE_MAX
assert TOOLS_SESSION_READONLY_MAX <= TOOLS_PLANE_READONLY_MAX
assert TOOLS_SESSION_WRITE_MAX <= TOOLS_PLANE_WRITE_MAX
assert TOOLS_SESSION_EXECUTE_MAX <= TOOLS_PLANE_EXECUTE_MAX
assert TOOLS_SESSION_QUEUED_MAX <= TOOLS_PLANE_QUEUED_MAX

# A record fits a frame, a batch the queue before it, all segments more than one checkpoint.
assert RECORD_BYTES_MAX < FRAME_BYTES_MAX
assert COMMIT_BATCH_FRAMES_MAX <= STORAGE_QUEUE_FRAMES_MAX
assert COMMIT_SHARED_BYTES_MAX <= COMMIT_BATCH_BYTES_MAX
assert COMMIT_BATCH_BYTES_MAX <= STORAGE_QUEUE_BYTES_MAX
assert CHECKPOINT_BYTES < JOURNAL_SEGMENT_BYTES * JOURNAL_SEGMENTS_MAX

# SHD-1: cleanup has ended and the exit delay is over before the hard exit.
assert SHUTDOWN_CLEANUP_MS + SHUTDOWN_EXIT_DELAY_MS < SHUTDOWN_HARD_MS
assert GATE_DRAIN_MS <= SHUTDOWN_CLEANUP_MS
