/* A script of faults takes the address of the first device away for a while, and then the device. */
#include "check.h"

static void next_is(struct ibv_context *ctx, enum ibv_event_type type)
{
	struct ibv_async_event event;
	OK(ibv_get_async_event(ctx, &event));
	EQ(event.event_type, type);
	ibv_ack_async_event(&event);
}

static int gids(struct ibv_context *ctx)
{
	struct ibv_gid_entry entries[16];
	return ibv_query_gid_table(ctx, entries, 16, 0);
}

int main(void)
{
	int count;
	struct ibv_device **list = ibv_get_device_list(&count);
	EQ(count, 2);
	struct ibv_device *first = list[0], *second = list[1];
	struct ibv_context *ctx = ibv_open_device(first);
	TRUE(ctx);
	EQ(gids(ctx), 1);
	next_is(ctx, IBV_EVENT_GID_CHANGE);
	next_is(ctx, IBV_EVENT_PORT_ERR);
	EQ(gids(ctx), 0);
	next_is(ctx, IBV_EVENT_GID_CHANGE);
	next_is(ctx, IBV_EVENT_PORT_ACTIVE);
	EQ(gids(ctx), 1);
	next_is(ctx, IBV_EVENT_DEVICE_FATAL);
	ibv_free_device_list(list);
	list = ibv_get_device_list(&count);
	EQ(count, 1);
	TRUE(list[0] == second);
	TRUE(!list[1]);
	/* The pointer is good as long as the process lives. */
	IS_NULL(ibv_open_device(first), EIO);
	OK(ibv_close_device(ctx));
	struct ibv_context *other = ibv_open_device(second);
	TRUE(other);
	OK(ibv_close_device(other));
	ibv_free_device_list(list);
	return 0;
}
