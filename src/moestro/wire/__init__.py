"""What crosses a process border: messages between API server and workers, encodings of KV events."""
