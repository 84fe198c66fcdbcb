"""callboard: a durable, local agent backplane."""
