"""``python -m vgpu.ctl`` is ``vgpuctl``."""

from __future__ import annotations

import sys

from vgpu.ctl.entry import main

sys.exit(main())
