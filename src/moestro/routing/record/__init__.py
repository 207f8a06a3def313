"""The record of routing decisions: kept, written, explained and replayed."""
