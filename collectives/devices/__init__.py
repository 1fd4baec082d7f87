"""Operations on device arrays: staged through the host, or by NCCL."""
