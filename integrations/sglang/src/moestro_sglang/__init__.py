"""Moestro inside SGLang: an official plug-in that orders waiting requests, places experts and chooses ranks."""
