"""The papers' tables, made again on virtual time."""
