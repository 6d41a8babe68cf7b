"""What holds for all tests."""

import os

# Models of the tests' size lose most of a second thread's time in handing work over: one is several times cheaper.
os.environ.setdefault("OMP_NUM_THREADS", "1")
