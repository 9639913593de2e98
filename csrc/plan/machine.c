#include "plan/machine.h"

#include <inttypes.h>

#define VALUE_MAX (UINT64_C(1) << 60)
#define SSD_COUNT_MAX 1024

int lh_plan_machine_check(const struct lh_plan_machine *machine, struct lh_error *err)
{
    const struct {
        const char *name;
        uint64_t value;
    } values[] = {
        {"gpu_flop_per_s", machine->gpu_flop_per_s},
        {"gpu_bytes", machine->gpu_bytes},
        {"link_in_bytes_per_s", machine->link_in_bytes_per_s},
        {"link_out_bytes_per_s", machine->link_out_bytes_per_s},
        {"host_bytes", machine->host_bytes},
        {"adam_params_per_s", machine->adam_params_per_s},
        {"ssd_read_bytes_per_s", machine->ssd_read_bytes_per_s},
        {"ssd_write_bytes_per_s", machine->ssd_write_bytes_per_s},
    };
    for (size_t i = 0; i < LH_COUNT_OF(values); i++)
        if (values[i].value == 0 || values[i].value > VALUE_MAX)
            return lh_error_set(err, -EINVAL,
                                "a machine's %s is %" PRIu64 ": it must be from 1 to %" PRIu64,
                                values[i].name, values[i].value, VALUE_MAX);
    if (machine->ssd_count == 0 || machine->ssd_count > SSD_COUNT_MAX)
        return lh_error_set(err, -EINVAL,
                            "a machine's ssd_count is %" PRIu64 ": it must be from 1 to %d",
                            machine->ssd_count, SSD_COUNT_MAX);
    if (machine->ssd_bytes > VALUE_MAX || machine->ssd_total_bytes_per_s > VALUE_MAX)
        return lh_error_set(err, -EINVAL,
                            "a machine's ssd_bytes %" PRIu64 " and ssd_total_bytes_per_s %" PRIu64
                            " must be at most %" PRIu64,
                            machine->ssd_bytes, machine->ssd_total_bytes_per_s, VALUE_MAX);
    return 0;
}

static uint64_t together(const struct lh_plan_machine *machine, uint64_t one_bytes_per_s)
{
    uint64_t total = machine->ssd_total_bytes_per_s;
    unsigned __int128 sum = (unsigned __int128)machine->ssd_count * one_bytes_per_s;
    if (total > 0 && sum > total)
        return total;
    return sum < VALUE_MAX ? (uint64_t)sum : VALUE_MAX;
}

uint64_t lh_plan_machine_read_bytes_per_s(const struct lh_plan_machine *machine)
{
    return together(machine, machine->ssd_read_bytes_per_s);
}

uint64_t lh_plan_machine_write_bytes_per_s(const struct lh_plan_machine *machine)
{
    return together(machine, machine->ssd_write_bytes_per_s);
}
