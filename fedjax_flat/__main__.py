"""`python -m fedjax_flat`."""

import sys

from fedjax_flat.cli import main

sys.exit(main())
