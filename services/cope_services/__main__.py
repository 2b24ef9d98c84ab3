"""`python -m cope_services`."""

from cope_services.server import main

raise SystemExit(main())
