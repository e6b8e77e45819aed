"""Boards: slower cores, and storage that may be an SD card.

Bounds to tell a broken board from a slow one, not measurements. What a board really does is in its
report; its own budget belongs under its `settings:` in the fleet file.
"""

ttft_budget_ms = 4000
load_deadline_s = 300  # 430 MB from an SD card at 10 MB/s, then the repacking
first_token_deadline_s = 60
