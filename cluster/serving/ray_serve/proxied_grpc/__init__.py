"""A call in Ray Serve's gRPC proxy, which several replicas may serve one after another."""
