"""`pagedray deploy`: a deployment on Kubernetes, before it starts and while it runs."""
