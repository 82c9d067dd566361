"""The commands for what runs programs on other grounds: container engines."""
