"""What all rooms use: errors, settings, link costs and schedules, without arrays or MPI."""
