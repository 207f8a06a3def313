"""Which waiting request is next: a policy answers a total order, and how long one can be passed over."""
