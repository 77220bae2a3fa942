/* Prints TAP: a line for each test. */
#include <stdio.h>

#include "ring.h"

static int count, failed;

static void check(bool good, const char *name)
{
    printf("%sok %d - %s\n", good ? "" : "not ", ++count, name);
    failed |= !good;
}

int main(void)
{
    struct ring ring;
    int item = 0;

    ring_clear(&ring);
    check(!ring_take(&ring, &item), "nothing can be taken from an empty ring");

    ring_put(&ring, 7);
    ring_put(&ring, 8);
    check(ring_take(&ring, &item) && item == 7, "the oldest is taken first");

    ring_clear(&ring);
    for (int i = 0; i < RING_SIZE; i++)
        ring_put(&ring, i);
    check(!ring_put(&ring, 9), "a full ring takes no more");

    printf("1..%d\n", count);
    return failed;
}
