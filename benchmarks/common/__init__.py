"""What every measurement needs: records that are added one by one, numbers and blocks in documents."""
