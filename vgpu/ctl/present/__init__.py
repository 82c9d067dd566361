"""How `vgpuctl` presents: tables, values, progress, the order of commands."""
