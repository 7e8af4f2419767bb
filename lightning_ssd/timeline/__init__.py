"""The timeline of training steps: the activity of every resource.

- `timeline` has the data, its pictures and its files;
- `timeline_profile` records it by torch's profiler.
"""

from lightning_ssd.timeline.timeline import BETWEEN, COLORS, PHASE_COLORS, Timeline
from lightning_ssd.timeline.timeline_profile import TimelineProfile
