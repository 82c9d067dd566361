"""The shared pages: how memory is made, sealed, mapped and handed out, and what lies in it (``layout.pxd``)."""
