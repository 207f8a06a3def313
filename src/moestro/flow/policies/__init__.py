"""What one device runs next: each looks at the micro-queues and chooses."""
