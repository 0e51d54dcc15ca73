"""A script that only forms its replica group with a layout, then sleeps."""

from __future__ import annotations

import sys
import time

import holdfast

holdfast.init(layout=holdfast.Layout(shard=int(sys.argv[1]), tensor=int(sys.argv[2])))
print("formed", flush=True)
time.sleep(600)
