"""What every measurement needs: records that are added one by one, blocks in documents, a set of pictures."""
