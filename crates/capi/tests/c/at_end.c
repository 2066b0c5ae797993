/*
 * Objects that a destructor ends, after `main`: the checker takes them for ended, and its exit status stops no destructor.
 *
 *   at_end ends|leaves [STATUS]
 *
 * With LIBRARY defined it is a library with a destructor of its own.
 */
#include <stdlib.h>
#include <string.h>

#include "check.h"

#ifdef LIBRARY

__attribute__((destructor)) static void at_end(void)
{
	puts("the library's destructor has run");
}

#else

static struct ibv_pd *pd;
static bool ends;

__attribute__((destructor)) static void at_end(void)
{
	if (ends)
		OK(ibv_dealloc_pd(pd));
	puts("the destructor has run");
}

int main(int argc, char **argv)
{
	TRUE(argc == 2 || argc == 3);
	ends = strcmp(argv[1], "ends") == 0;
	pd = ibv_alloc_pd(open_device());
	TRUE(pd != NULL);
	return argc == 3 ? atoi(argv[2]) : 0;
}

#endif
