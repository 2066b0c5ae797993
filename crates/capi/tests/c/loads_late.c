/*
 * A program that loads the library late (dlopen): its handler of exit(3) runs behind that of the checker.
 *
 *   loads_late ends|leaves
 */
#include "check.h"

#include <dlfcn.h>
#include <unistd.h>

static struct ibv_pd *pd;
static int (*dealloc)(struct ibv_pd *);
static bool ends;

static void at_end(void)
{
	/* It takes its locks, and finds the domain or not. */
	if (ends)
		OK(dealloc(pd));
	puts("the handler has run");
}

int main(int argc, char **argv)
{
	int n;
	alarm(20);
	TRUE(argc == 2);
	ends = strcmp(argv[1], "ends") == 0;
	OK(atexit(at_end));
	void *library = dlopen("libibverbs.so.1", RTLD_NOW);
	TRUE(library != NULL);
	struct ibv_device **(*list)(int *) = dlsym(library, "ibv_get_device_list");
	struct ibv_context *(*open)(struct ibv_device *) = dlsym(library, "ibv_open_device");
	struct ibv_pd *(*alloc)(struct ibv_context *) = dlsym(library, "ibv_alloc_pd");
	dealloc = dlsym(library, "ibv_dealloc_pd");
	pd = alloc(open(list(&n)[0]));
	TRUE(pd != NULL);
	return 0;
}
