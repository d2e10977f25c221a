"""The processes of one job: joining, monitoring, exchanging, ending."""
