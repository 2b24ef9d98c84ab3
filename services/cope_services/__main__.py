"""`python -m cope_services`."""

from cope_services.http.server import main

raise SystemExit(main())
