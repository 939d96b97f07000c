"""`pagedray deploy`: what concerns a deployment on Kubernetes, without a cluster's API."""
