"""What users may have of a node: the sections ``[quota]`` of the configuration, and the checks. Pure.

``quota``    the sections, and which of them holds for a user
``checks``   whether a new or changed vGPU fits a quota, with the reason
``idle``     which vGPUs have been idle for too long: a warning first, then the reclaim
"""
