"""Speed and error of ampkernels and its peers, side by side: see README.md in this folder."""

import time

STARTED = time.perf_counter()  # before torch is imported: a time limit counts what the user waits for
