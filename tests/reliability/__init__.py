"""Does it survive? Kills, interrupts, full disks and damaged files, counted.

``python -m tests.reliability`` prints the table: for each long computation how often it was struck
and how often anything was lost, wrong or said without a clear error; for each reader of files how
many damaged ones it was given. The default tests run the same with small counts.
"""
