"""Tokenizer, chat templates, incremental detokenizing, stop strings, and the threads that they run on."""
