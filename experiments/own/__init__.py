"""What users bring of their own: functions that a config names."""
