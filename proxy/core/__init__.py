"""Decisions: functions from values to plans; nothing here waits, opens, logs or reads a clock."""
