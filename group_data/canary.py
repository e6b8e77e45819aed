"""Wave 0 decides for all the others: more smoke requests, and a release more to go back to."""

smoke_requests = 20
keep_releases = 3
