"""``python -m anyverbs`` is ``anyverbs``."""

from anyverbs import main

main()
