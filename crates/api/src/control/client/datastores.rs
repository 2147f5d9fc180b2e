//! Requests about datastores.

use bytes::Bytes;
use http::Method;

use super::super::datastore_drains::{CreateDatastoreDrain, DatastoreDrain};
use super::super::datastores::{DatastoreDetails, ManagedDatastore, UpdateDatastore};
use super::{ManagerClient, ManagerError};
use crate::client::segment;

impl ManagerClient {
    /// Lists every datastore, by name.
    pub async fn datastores(&self) -> Result<Vec<ManagedDatastore>, ManagerError> {
        self.all("/api/v1/datastores").await
    }

    /// Returns a datastore with the disks in it. `named`: its ID, name or path.
    pub async fn datastore(&self, named: &str) -> Result<DatastoreDetails, ManagerError> {
        self.get(&path_of(named)).await
    }

    /// Changes the settings of a datastore.
    pub async fn update_datastore(
        &self,
        named: &str,
        request: &UpdateDatastore,
    ) -> Result<ManagedDatastore, ManagerError> {
        self.ask(Method::PATCH, &path_of(named), request).await
    }

    /// Drains a datastore.
    pub async fn create_datastore_drain(
        &self,
        named: &str,
        request: &CreateDatastoreDrain,
    ) -> Result<DatastoreDrain, ManagerError> {
        self.ask(Method::POST, &format!("{}/drain", path_of(named)), request).await
    }

    /// Lists every drain of a datastore, the oldest first.
    pub async fn datastore_drains(&self) -> Result<Vec<DatastoreDrain>, ManagerError> {
        self.all("/api/v1/datastore-drains").await
    }

    pub async fn datastore_drain(&self, id: &str) -> Result<DatastoreDrain, ManagerError> {
        self.get(&format!("/api/v1/datastore-drains/{}", segment(id))).await
    }

    /// Cancels a drain of a datastore.
    pub async fn cancel_datastore_drain(&self, id: &str) -> Result<DatastoreDrain, ManagerError> {
        let path = format!("/api/v1/datastore-drains/{}", segment(id));
        let response = self.send(Method::DELETE, &path, Bytes::new()).await?;
        self.json(response).await
    }

    /// Moves the disks of a drain back.
    pub async fn undo_datastore_drain(&self, id: &str) -> Result<DatastoreDrain, ManagerError> {
        let path = format!("/api/v1/datastore-drains/{}/undo", segment(id));
        let response = self.send(Method::POST, &path, Bytes::new()).await?;
        self.json(response).await
    }
}

fn path_of(named: &str) -> String {
    format!("/api/v1/datastores/{}", segment(named))
}
