"""Chats as prompts: templates, and the processes that render them."""
