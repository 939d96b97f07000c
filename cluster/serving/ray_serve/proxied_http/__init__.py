"""A request in Ray Serve's HTTP proxy, and its response, made of replicas' responses."""
