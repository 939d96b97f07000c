"""A request in Ray Serve's HTTP proxy, and the response that is made of those of replicas."""
