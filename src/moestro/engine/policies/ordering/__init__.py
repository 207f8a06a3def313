"""Order policies: a total order of the waiting requests, and a bound on how long a request can be passed over."""
