"""The requests of the control link, and what they answer."""
