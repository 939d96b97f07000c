"""The scheduler and the router in virtual time: ranks are a model of how long steps take."""
