from services.server import main

raise SystemExit(main())
