"""Tokenizer, chat templates, detokenizing, parsers of answers, stop strings, and the threads that they run on."""
