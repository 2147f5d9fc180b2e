//! How many moves run at a time.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;
use utoipa::openapi::schema::{Object, ObjectBuilder, SchemaType, Type};

/// `GET /api/v1/limits`: how many moves may run at a time, as it holds now. 0 lets nothing begin.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "out_of_host": null, "into_host": null, "per_datastore": 128, "in_all": 20, "datastores": { "/srv/slow": 2 },
    "hosts": { "host-a": { "out": 1, "into": 2 } },
    "by_link": [{ "bits_per_s": null, "moves": 2 }, { "bits_per_s": 1_000_000_000, "moves": 4 }]
}))]
#[serde(default)]
pub struct MoveLimits {
    /// Out of each host that has no number of its own; none: by its link.
    pub out_of_host: Option<u32>,
    /// Into each host that has no number of its own; none: by its link.
    pub into_host: Option<u32>,
    /// Of VMs with disks on one datastore, where it has no number of its own.
    pub per_datastore: u32,
    /// In all; none: no limit.
    pub in_all: Option<u32>,
    /// Datastores with a number of their own, by path.
    pub datastores: BTreeMap<String, u32>,
    /// Hosts with numbers of their own: by `most_moves` of the host, or by the manager's configuration.
    pub hosts: BTreeMap<String, HostMoves>,
    /// What a host's link makes of it, slowest first.
    pub by_link: Vec<LinkMoves>,
}

/// A host's own numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostMoves {
    /// Out of it; none: as for every host.
    pub out: Option<u32>,
    /// Into it; none: as for every host.
    pub into: Option<u32>,
}

/// Moves at a time over a link, in each direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LinkMoves {
    /// From this speed on, bits per second; none: the speed is not known.
    pub bits_per_s: Option<u64>,
    /// So many.
    pub moves: u32,
}

/// `PATCH /api/v1/limits`: what is absent stays, and null takes back what was set: then the manager's configuration holds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
#[schema(example = json!({ "in_all": 20, "out_of_host": null, "datastores": { "/srv/slow": 2 } }))]
pub struct UpdateLimits {
    /// Out of each host that has no number of its own.
    #[serde(deserialize_with = "named", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u32>, maximum = 1_000_000)]
    pub out_of_host: Option<Option<u32>>,
    /// Into each host that has no number of its own.
    #[serde(deserialize_with = "named", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u32>, maximum = 1_000_000)]
    pub into_host: Option<Option<u32>>,
    /// Of VMs with disks on one datastore.
    #[serde(deserialize_with = "named", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u32>, maximum = 1_000_000)]
    pub per_datastore: Option<Option<u32>>,
    /// In all.
    #[serde(deserialize_with = "named", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u32>, maximum = 1_000_000)]
    pub in_all: Option<Option<u32>>,
    /// Numbers of single datastores, by path. Those that are not named stay.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[schema(schema_with = datastore_numbers)]
    pub datastores: BTreeMap<String, Option<u32>>,
}

/// A number, or null, by the path of a datastore.
fn datastore_numbers() -> Object {
    let path = ObjectBuilder::new()
        .schema_type(Type::String)
        .pattern(Some("^/"))
        .max_length(Some(1024))
        .build();
    let number = ObjectBuilder::new()
        .schema_type(SchemaType::from_iter([Type::Integer, Type::Null]))
        .minimum(Some(0))
        .maximum(Some(1_000_000));
    ObjectBuilder::new()
        .schema_type(Type::Object)
        .property_names(Some(path))
        .additional_properties(Some(number))
        .max_properties(Some(1000))
        .description(Some(
            "Numbers of single datastores, by path; null takes one back. Those that are not named stay.",
        ))
        .build()
}

/// Tells null from what is absent.
pub(super) fn named<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Option<Option<T>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn null_is_told_from_what_is_absent() {
        let read: UpdateLimits =
            serde_json::from_str(r#"{"in_all":null,"out_of_host":3}"#).unwrap();
        assert_eq!(
            (read.in_all, read.out_of_host, read.into_host),
            (Some(None), Some(Some(3)), None)
        );
        assert_eq!(serde_json::to_string(&read).unwrap(), r#"{"out_of_host":3,"in_all":null}"#);
    }
}
