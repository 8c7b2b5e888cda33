"""Rewrites of requests that keep their prompts from changing at the beginning."""
