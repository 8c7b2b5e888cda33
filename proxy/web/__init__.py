"""The listeners: clients, operators, the live page."""
