"""Decisions about a launch: may it go to the GPU now, and for how long will the queue be busy?"""
