// Opens the device, in a program that has more rights than its user: it obeys no variable.
#include <infiniband/verbs.h>
#include <stdio.h>
#include <sys/auxv.h>

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context = list && list[0] ? ibv_open_device(list[0]) : NULL;
	printf("secure %lu, %s, %s\n", getauxval(AT_SECURE), list && list[0] ? ibv_get_device_name(list[0]) : "none",
	       context ? "open" : "not open");
	return 0;
}
