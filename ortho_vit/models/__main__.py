"""python -m ortho_vit.models [FOLDER]     writes README.md, a page about the weights in a folder, into it."""

import sys

from ortho_vit.models.hub import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
