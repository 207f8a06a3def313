"""Bodies and fields of requests: decoded, validated, and converted to engine requests."""
